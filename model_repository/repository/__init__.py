"""The parts of a model repository: config.pbtxt files, the manifest of engines, and checks."""
