"""The command line: `llamatrio serve | run | info`."""
