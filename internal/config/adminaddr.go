package config

// AdminAddr is where a process with this environment serves its health, for a check that runs beside it.
func AdminAddr() (string, error) {
	var p Process
	if err := load(&p); err != nil {
		return "", err
	}
	return p.AdminAddr, nil
}
