"""Guided decoding for libraries without a safe one: a process of its own compiles and tries each
grammar first.
"""
