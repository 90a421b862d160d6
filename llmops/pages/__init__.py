"""Reports as self-contained HTML files (bench, plan, …): the page, its tables, its plots."""
