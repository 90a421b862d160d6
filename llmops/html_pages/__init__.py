"""Self-contained HTML reports: page elements, and plots as inline SVG."""
