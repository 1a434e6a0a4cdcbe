"""What everything may use and what knows nothing of training: errors, files, the command line, the
machine.
"""
