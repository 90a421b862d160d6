"""What the quality gate keeps in memory instead of reading it again, in bytes of float32: small models as a whole."""

# decoder layers, all together
CACHED_LAYERS_BYTES = 512 << 20
# embedding and output matrix, each
CACHED_TABLE_BYTES = 256 << 20
