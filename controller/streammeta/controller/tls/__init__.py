"""TLS as a controller uses it: its own certificates, and connections between controllers.

Separate from `streammeta.tls`, which clients share: these modules read the controller's
configuration and policy, and no layer below the controller may import them.
"""
