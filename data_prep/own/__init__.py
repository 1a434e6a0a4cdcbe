"""A stranger's data set: tables and folders in the usual formats, whose columns the user names."""
