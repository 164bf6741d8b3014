"""TLS as a controller uses it: its own certificates, and connections between controllers."""
