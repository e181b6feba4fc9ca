"""The operations that touch pages: a slow reference beside each fast backend, one selector. Knows nothing of ours."""
