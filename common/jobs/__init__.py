"""Many pictures: what was asked, where each is written, what fails; recipes read back, of other programs too."""
