"""How close two numbers must be; one place for the cheap comparison and the workers."""

RELATIVE_TOLERANCE = 1e-6  # the grading policy, point 3
ABSOLUTE_TOLERANCE = 1e-12  # for golds such as 0, where nothing but float noise is relative
