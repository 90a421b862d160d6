"""What the quality gate keeps in memory instead of reading it again, in bytes of float32: small models as a whole."""

# decoder layers, all together
KEPT_LAYERS = 512 << 20
# embedding and output matrix, each
KEPT_TABLE = 256 << 20
