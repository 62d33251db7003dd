"""Process supervision: launch, exit codes, stop requests, watchdog, logs. Skip it at first reading."""
