// Command runc-within-bounds is an OCI runtime that asks runc for no capability that this machine does not have.
//
// A privileged container gets every capability that the engine knows. Where the bounding set lacks one (a VM or
// container without CAP_SYS_RESOURCE, say) runc cannot grant it and the container does not start. This program
// removes such capabilities from the process description that runc is about to read, then becomes runc. It never
// adds any, and where nothing is lacking it changes nothing.
//
// RAILMATE_RUNC names the runc to run.
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// Capability names by number: linux/capability.h.
var names = strings.Fields(`CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP
	LINUX_IMMUTABLE NET_BIND_SERVICE NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO
	SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE
	AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON
	BPF CHECKPOINT_RESTORE`)

func main() {
	runc := os.Getenv("RAILMATE_RUNC")
	if runc == "" {
		fail(fmt.Errorf("RAILMATE_RUNC does not name a runc"))
	}
	bounding, err := boundingSet()
	if err != nil {
		fail(err)
	}
	if file, inConfig := processFile(os.Args[1:]); file != "" {
		if err := limitFile(file, inConfig, bounding); err != nil {
			fail(err)
		}
	}
	fail(syscall.Exec(runc, append([]string{runc}, os.Args[1:]...), os.Environ()))
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, "runc-within-bounds:", err)
	os.Exit(1)
}

// processFile finds the file with the description of the process that runc is asked to start: a bundle's
// config.json (inConfig), where the process is one field, or the process file of `exec`.
func processFile(args []string) (file string, inConfig bool) {
	command, values := "", map[string]string{}
	aliases := map[string]string{"b": "bundle", "p": "process"}
	for i, arg := range args {
		if !strings.HasPrefix(arg, "-") {
			if command == "" && (arg == "create" || arg == "run" || arg == "restore" || arg == "exec") {
				command = arg
			}
			continue
		}
		name, value, joined := strings.Cut(strings.TrimLeft(arg, "-"), "=")
		if full, ok := aliases[name]; ok {
			name = full
		}
		if !joined && i+1 < len(args) {
			value = args[i+1]
		}
		values[name] = value
	}
	switch command {
	case "create", "run", "restore":
		return filepath.Join(values["bundle"], "config.json"), true
	case "exec":
		return values["process"], false
	}
	return "", false
}

// boundingSet reads this process's capability bounding set, one bit a capability.
func boundingSet() (uint64, error) {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0, err
	}
	for _, line := range strings.Split(string(status), "\n") {
		if digits, ok := strings.CutPrefix(line, "CapBnd:"); ok {
			return strconv.ParseUint(strings.TrimSpace(digits), 16, 64)
		}
	}
	return 0, fmt.Errorf("/proc/self/status has no CapBnd line")
}

func limitFile(file string, inConfig bool, bounding uint64) error {
	data, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	limited, changed, err := limit(data, inConfig, bounding)
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	if !changed {
		return nil
	}
	return os.WriteFile(file, limited, 0o600)
}

// limit removes the capabilities outside the bounding set from every set of the process. Whatever else the
// document holds stays as it is, large numbers too.
func limit(data []byte, inConfig bool, bounding uint64) (out []byte, changed bool, err error) {
	var document map[string]any
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.UseNumber()
	if err := decoder.Decode(&document); err != nil {
		return nil, false, err
	}
	process := document
	if inConfig {
		process, _ = document["process"].(map[string]any)
	}
	sets, _ := process["capabilities"].(map[string]any)
	for name, value := range sets {
		wanted, _ := value.([]any)
		kept := []any{}
		for _, capability := range wanted {
			if text, ok := capability.(string); ok && lacking(text, bounding) {
				changed = true
				continue
			}
			kept = append(kept, capability)
		}
		sets[name] = kept
	}
	if !changed {
		return data, false, nil
	}
	out, err = json.Marshal(document)
	return out, true, err
}

func lacking(capability string, bounding uint64) bool {
	for number, name := range names {
		if capability == "CAP_"+name {
			return bounding>>number&1 == 0
		}
	}
	return false // not known here: runc's own business
}
