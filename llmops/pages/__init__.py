"""Reports as one HTML file each, for bench, plan and whoever has figures: the page, its tables, its plots."""
