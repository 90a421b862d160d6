"""Usage under fire: requests while everything that carries their bill is killed, and then the books are checked."""
