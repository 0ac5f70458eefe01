"""The step loop: schedule, execute, process; and what it drives."""
