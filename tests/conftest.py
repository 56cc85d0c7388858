from tests.emucuda.plugin import emucuda, emucuda_checked

__all__ = ["emucuda", "emucuda_checked"]
