"""The step loop: schedule, execute, process; and the thread that runs it."""
