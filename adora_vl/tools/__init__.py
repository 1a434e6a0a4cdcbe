"""The tools that a policy may call between its turns.

They are tools of ours and of the user's. This package also reads a call and answers it.
"""
