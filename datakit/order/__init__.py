"""Which sample comes when: mixture, epochs, the blend of them, cursors and records."""
