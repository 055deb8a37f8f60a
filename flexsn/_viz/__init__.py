"""Pictures and monitors."""
