// Package deploy holds no code: its tests check compose.yaml and the Dockerfile without a container engine.
package deploy
