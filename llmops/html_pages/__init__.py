"""Self-contained HTML reports: elements of a page, and plots as inline SVG."""
