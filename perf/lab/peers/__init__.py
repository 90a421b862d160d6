"""Peers, run side by side from their public wheels, each in an environment of its own."""
