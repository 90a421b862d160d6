"""What clients see of a replica that is killed, stopped or restarted under their streams."""
