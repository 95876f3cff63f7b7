"""Published formats of draft heads and adapters: each is read and written side by side."""
