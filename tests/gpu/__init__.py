"""What differs on a GPU. The same tests run on the CPU, where they can only find mistakes of the tests."""
