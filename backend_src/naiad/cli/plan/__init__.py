"""`naiad plan`: how many replicas a load needs, what latency it gets, and what it costs."""
