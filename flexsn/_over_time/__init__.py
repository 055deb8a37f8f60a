"""A network whose forward is one step, run over a whole sequence."""
