package main

import (
	"testing"
)

const full = 1<<41 - 1
const withoutSysResource = full &^ (1 << 24)

func TestCapabilityOutsideTheBoundingSetIsRemovedFromEverySet(t *testing.T) {
	in := `{"process":{"capabilities":{"bounding":["CAP_SYS_ADMIN","CAP_SYS_RESOURCE"],"permitted":["CAP_SYS_RESOURCE"]}}}`
	want := `{"process":{"capabilities":{"bounding":["CAP_SYS_ADMIN"],"permitted":[]}}}`
	out, changed, err := limit([]byte(in), true, withoutSysResource)
	if err != nil || !changed || string(out) != want {
		t.Fatalf("got %s, changed %v, error %v", out, changed, err)
	}
}

func TestNothingChangesWhereNothingIsLacking(t *testing.T) {
	in := `{ "capabilities": {"bounding": ["CAP_SYS_RESOURCE", "CAP_OF_THE_FUTURE"]} }`
	out, changed, err := limit([]byte(in), false, full)
	if err != nil || changed || string(out) != in {
		t.Fatalf("got %s, changed %v, error %v", out, changed, err)
	}
}

func TestLargeNumbersSurvive(t *testing.T) {
	in := `{"capabilities":{"bounding":["CAP_SYS_RESOURCE"]},"limit":18446744073709551615}`
	want := `{"capabilities":{"bounding":[]},"limit":18446744073709551615}`
	out, _, err := limit([]byte(in), false, withoutSysResource)
	if err != nil || string(out) != want {
		t.Fatalf("got %s, error %v", out, err)
	}
}

func TestProcessFileIsFoundInRuncArguments(t *testing.T) {
	for _, c := range []struct {
		args     []string
		file     string
		inConfig bool
	}{
		{[]string{"--root", "/r", "create", "--bundle", "/b", "id"}, "/b/config.json", true},
		{[]string{"--root=/r", "run", "-b=/b", "id"}, "/b/config.json", true},
		{[]string{"--log", "/l", "exec", "--process", "/p", "--detach", "id"}, "/p", false},
		{[]string{"delete", "--force", "id"}, "", false},
	} {
		if file, inConfig := processFile(c.args); file != c.file || inConfig != c.inConfig {
			t.Errorf("%v: got %q, %v", c.args, file, inConfig)
		}
	}
}
