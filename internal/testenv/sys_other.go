//go:build !linux

package testenv

import "syscall"

func childSysProcAttr() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }
