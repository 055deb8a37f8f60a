"""What a kernel loads, keeps, saves, recomputes and stores."""
