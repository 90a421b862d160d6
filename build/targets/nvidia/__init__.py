"""What the tensorrt and the pytorch target share: the request, quantising, stages, resources."""
