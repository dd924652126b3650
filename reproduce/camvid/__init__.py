"""The tables of LTS, selective scaling and translation invariance on CamVid."""
