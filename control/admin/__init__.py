"""Administration: operations that are done on a store (`work/`), served over HTTP (`routes`), asked for (`client`)."""
