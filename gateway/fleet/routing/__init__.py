"""Where a request goes: pure, without a clock of its own."""
