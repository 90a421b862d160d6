"""What the gateway tells about itself: metrics and logs."""
