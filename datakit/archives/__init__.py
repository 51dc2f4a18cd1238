"""Archives: stores compressed so that ranges can be read, and stores read from where they are, behind URLs too."""
