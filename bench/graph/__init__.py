"""What the metrics of the graph share: a graph, a database with a graph writer, a population of a million."""
