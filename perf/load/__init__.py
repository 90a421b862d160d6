"""When requests leave: arrival processes, closed loop, the runner, the search for the highest rate."""
