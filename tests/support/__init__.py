"""What tests of several rooms share: runs, data in published formats, a browser, an endpoint."""
