"""What a policy may call between its turns: tools of ours and of the user's, how a call is read and
what it answers.
"""
