package pgtemp

import "syscall"

// sysProcAttr puts the server in a process group of its own, so that Ctrl-C in a terminal reaches only the parent,
// who then stops it in order. If the parent is killed, the kernel sends an immediate shutdown.
func sysProcAttr(cred *syscall.Credential) *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Credential: cred, Setpgid: true, Pdeathsig: syscall.SIGQUIT}
}
