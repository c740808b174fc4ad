"""Model families: names, networks and the loading of their weights."""
