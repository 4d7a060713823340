from hypothesis import settings

settings.register_profile("coalmine", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("coalmine")
