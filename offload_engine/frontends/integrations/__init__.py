"""The engine inside trainers and schedules of other libraries. Import what you use by its module; nothing is here."""
