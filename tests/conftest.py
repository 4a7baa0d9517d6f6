"""Its place puts this directory on the path, so that tests import `helpers`."""
