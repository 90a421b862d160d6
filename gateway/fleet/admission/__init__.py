"""When a request goes: who is next, whether there is room, and who is refused at once."""
