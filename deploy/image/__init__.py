"""What the Dockerfiles run while they build an image, with nothing but the standard library.

pins    what pip is held to
trim    takes out what nobody runs: tests, headers
sbom    what is in it, as CycloneDX
"""
