"""Running one execution: tasks, harnesses, sandboxes, grading.

Owns everything between "this task, this attempt" and an outcome with a reward. Task text, model output and
test scripts run inside a sandbox and nowhere else; nothing that an execution wrote is followed, parsed as
code or run outside of one.
"""
