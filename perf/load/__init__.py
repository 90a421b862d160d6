"""When requests leave: arrival processes, closed loop, the runner, the search for the highest rate.

What came of it belongs to `report/`.
"""
