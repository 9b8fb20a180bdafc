"""Training by several processes of one worker, a device each."""
