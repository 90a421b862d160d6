"""When a request goes: who is next, whether there is room, and who is refused at once.

Where it goes belongs to `routing/`; the two do not know each other.
"""
